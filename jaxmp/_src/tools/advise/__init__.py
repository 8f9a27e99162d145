"""Which sharding of a product to take."""
