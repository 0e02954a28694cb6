"""The same jobs from a script that asks for zero itself."""

import zero.hf

zero.hf.enable()

import jobs  # noqa: E402  (after enable)

if __name__ == "__main__":
    jobs.main()
