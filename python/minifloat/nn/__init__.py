"""Layers under a recipe: conversion, the module, and the state beside its parameters."""
