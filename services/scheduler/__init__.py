"""The scheduler process: takes an epoch, attaches workers, serves sessions with gateways."""
