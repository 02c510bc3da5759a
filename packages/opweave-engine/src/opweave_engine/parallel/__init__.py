"""Several processes: tensor-parallel ranks and data-parallel replicas."""
