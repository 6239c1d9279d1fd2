"""Read blocks from drives of this host, without the agent."""
