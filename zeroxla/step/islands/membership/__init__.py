"""Who takes part in an exchange between islands, and how bytes get from one to another. No JAX."""
