"""What casts do to a model's operands: mf.inspect, `minifloat inspect`, and what is not finite."""
