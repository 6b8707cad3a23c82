"""From a pilot to a sized campaign: short real runs, what they say, and a file with what follows."""
