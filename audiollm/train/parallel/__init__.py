"""How gradients, weights and optimizer states are spread over ranks: DDP, FSDP2, ZeRO."""
