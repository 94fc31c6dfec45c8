"""Plans from few blocks against plans from all of them, for the shapes of models that people train."""
