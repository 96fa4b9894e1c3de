"""From a module to a graph whose nodes are its layers."""
