"""From a captured graph to the programs of stages."""
