"""Parts of the state that live in host memory or on disk, and how they come to the devices."""
