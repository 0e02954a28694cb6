"""What run_translation.py and run_distill.py do without models and data of yours."""
