"""From settings to objects: model and data, loss, optimizer, learning rate, averages, frozen layers."""
