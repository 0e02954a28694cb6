"""`zero estimate` predicts what a rank will hold and move in a step, before anything is started."""
