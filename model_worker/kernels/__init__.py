"""The operations models are made of, one interface with a backend per kind of device."""
