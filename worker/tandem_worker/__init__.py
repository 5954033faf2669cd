"""The JAX side of Tandem: model, lock-step, faults, link. The only package that imports jax."""
