"""Pictures: timelines, shares of a step, efficiency; and the style that they share."""
