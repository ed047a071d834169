// Benchmark of MPI's all-reduce, timed like the executor in allreduce.cpp: mpirun -np WORLD
// allreduce_mpi [largest MiB]. Built by bench/executor_bandwidth.py.
#include <mpi.h>

#include <cstring>

#include "measure.h"

namespace {

void reduce(float* data, std::size_t count) {
  MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

void barrier() { MPI_Barrier(MPI_COMM_WORLD); }

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  bench::pin(rank);
  const std::size_t largest_bytes = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 128) << 20;
  std::vector<float> data(largest_bytes / sizeof(float), 1.0F);
  bench::table({rank, world}, data.data(), largest_bytes, reduce, barrier);
  std::vector<double> all;
  for (int t = 0; t < 101; ++t) {
    const auto begin = bench::Clock::now();
    for (int i = 0; i < 200; ++i) barrier();
    all.push_back(bench::microseconds(bench::Clock::now() - begin) / 200);
  }
  const bench::Times us = bench::summary(all);
  if (rank == 0) std::printf("%12s %12.3f %12.3f\n", "barrier", us.median, us.best);
  MPI_Finalize();
  return 0;
}
