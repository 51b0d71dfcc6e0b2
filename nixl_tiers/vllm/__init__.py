"""vLLM's face of the store: an offloading spec for the stock OffloadingConnector. Importing this starts nothing."""
