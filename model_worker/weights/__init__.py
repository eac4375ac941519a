"""Reading models from files: shape, description and weights of GGUF files and Hugging Face directories."""
