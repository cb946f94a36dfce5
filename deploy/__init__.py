"""Real federations: certificates and keys, and the programs that run on the machines."""
