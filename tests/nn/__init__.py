"""Tests of one process's layers: conversion, random bits, reuse of codes, training state."""
