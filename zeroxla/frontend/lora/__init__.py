"""LoRA: low-rank adapters on the dense leaves of a model that stays as it is."""
