from benchmarks.quality.streams.make import main

if __name__ == "__main__":
    main()
