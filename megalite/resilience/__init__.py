"""What keeps a run alive: bad steps, and where they come from."""
