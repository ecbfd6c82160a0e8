"""From settings to objects: model and data, loss, optimizer, learning rate, weight average, frozen layers."""
