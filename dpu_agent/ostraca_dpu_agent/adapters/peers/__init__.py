"""Call other agents of the fabric: over the network, or in the same process."""
