"""Linear layers whose weight is a DTensor, and sharding rules of the pure ops."""
