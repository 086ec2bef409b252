"""What decode costs on a GPU, dense and compressed."""
