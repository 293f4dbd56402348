"""When a leaf travels: units, the fetch plan, its order, and the runner that follows it."""
