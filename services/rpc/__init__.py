"""What every gRPC process here shares: server bootstrap, channels, the error tree and its statuses, logs."""
