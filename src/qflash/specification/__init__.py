"""What defines the bits: attention, layers of integer networks, fixed point, quantisation, recipes. It imports no kernel."""
