"""What of the training state lives outside the devices' memory."""
