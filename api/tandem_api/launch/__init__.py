"""How a run is begun: on this machine, or as a PairRun in a cluster."""
