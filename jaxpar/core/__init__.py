"""The plan, which all strategies share."""
