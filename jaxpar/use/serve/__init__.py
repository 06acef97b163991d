"""A small HTTP service for the trained model of a run (`jaxpar serve`)."""
