"""Builds objects from settings: model and data, loss, optimizer, learning rate, weight average, frozen layers."""
