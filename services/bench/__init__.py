"""A load generator's pure part: what is asked when, and what the answers' times say. No gRPC, no client."""
