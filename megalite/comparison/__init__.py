"""What two recorded runs have in common, and the first place at which they part. No torch."""
