"""State that lives in host memory or on disk."""
