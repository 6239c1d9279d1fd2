"""Feed of a shared cache for routers: which pages of a volume can be loaded from the fabric.

Shard owners know keys only, derived under a secret. Routers know pages by the engine's hashes. So data paths
keep the names of blocks that pass (``ostraca_dpu_agent.datapath.names``). The feeding agent collects all
names, looks the blocks up in turn (``router_feed``), and announces whole pages (``pages``, ``messages``).
"""
