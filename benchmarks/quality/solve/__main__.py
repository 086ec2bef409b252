from benchmarks.quality.solve.cli import main

if __name__ == "__main__":
    main()
