"""The one model of time and memory: of a layer, a stage, an exchange, an update and a step."""
