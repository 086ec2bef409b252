"""Several processes of one server: tensor-parallel ranks and pipeline stages."""
