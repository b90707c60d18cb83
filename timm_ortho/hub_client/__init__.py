"""Client of the Hugging Face Hub: downloads and error messages."""
