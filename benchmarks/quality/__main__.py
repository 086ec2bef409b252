from benchmarks.quality.cli import main

if __name__ == "__main__":
    main()
