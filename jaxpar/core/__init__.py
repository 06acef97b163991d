"""The plan and the traffic of rings, which all strategies share."""
