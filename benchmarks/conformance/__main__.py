from benchmarks.conformance.runner import main

if __name__ == "__main__":
    main()
