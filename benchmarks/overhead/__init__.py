"""What compression adds to the steps of a scheduler, without a model."""
