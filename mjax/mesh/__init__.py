"""Device mesh: axes, device order, sharding rules, collectives by role."""
