"""Pictures of the blocks of a product on each device."""
