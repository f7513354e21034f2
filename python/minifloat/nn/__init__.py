"""Layers under a recipe: conversion, the module, and the state beside its parameters."""

from .convert.construction import quantized_model_init
from .convert.filters import auto_filter_small_kn
from .state.recipe_state import DelayedScaling

__all__ = ["DelayedScaling", "auto_filter_small_kn", "quantized_model_init"]
