"""Pictures of which device holds which block of a product."""
