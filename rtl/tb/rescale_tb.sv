// Checks rescale.sv against a folder of `qflash vectors --trace`: linear layers, patch embeddings, means over tokens.
`include "case.svh"
`ifdef IN_offset_FILE
`ifndef IN_bias_FILE
`define IN_bias_FILE `IN_offset_FILE
`define IN_bias_SIZE `IN_offset_SIZE
`endif
`endif
`ifdef STEP_y_2_FILE  // of patch merging the second operator
`define WANTED_FILE `STEP_y_2_FILE
`define WANTED_WIDTH `STEP_y_2_WIDTH
`else
`define WANTED_FILE `STEP_y_FILE
`define WANTED_WIDTH `STEP_y_WIDTH
`endif

module rescale_tb;
    localparam int SIZE = `STEP_acc_SIZE;
    localparam int OUTPUTS = `IN_bias_SIZE;
    localparam int OUT = `WANTED_WIDTH;

    logic clk = 1'b0;
    logic [`STEP_acc_WIDTH-1:0] sums[0:SIZE-1];
    logic [31:0] biases[0:OUTPUTS-1];
    logic [31:0] multipliers[0:OUTPUTS-1];
    logic [15:0] residuals[0:SIZE-1];
    logic [`STEP_rescale_acc_WIDTH-1:0] wanted_rescaled[0:SIZE-1];
    logic [OUT-1:0] wanted[0:SIZE-1];
    logic signed [31:0] acc, bias, multiplier, rescaled;
    logic signed [15:0] residual;
    logic signed [OUT-1:0] y;
    int values = 0, mismatches = 0, cycles = 0;

    rescale #(.OUT(OUT)) dut (.left(5'(`PARAM_left)), .*);
    always #5 clk = ~clk;
    always @(posedge clk) cycles++;

    initial begin
        $readmemh(`STEP_acc_FILE, sums);
        $readmemh(`IN_bias_FILE, biases);
        $readmemh(`IN_multiplier_FILE, multipliers);
        $readmemh(`STEP_rescale_acc_FILE, wanted_rescaled);
        $readmemh(`WANTED_FILE, wanted);
        for (int i = 0; i < SIZE; i++) residuals[i] = 16'd0;
`ifdef STEP_residual_FILE
        // one for all images, as positions are, comes again
        $readmemh(`STEP_residual_FILE, residuals, 0, `STEP_residual_SIZE - 1);
        for (int i = `STEP_residual_SIZE; i < SIZE; i++) residuals[i] = residuals[i-`STEP_residual_SIZE];
`endif
        for (int i = 0; i < SIZE; i++) begin
            @(negedge clk);
            acc = 32'($signed(sums[i]));
            bias = biases[i%OUTPUTS];
            multiplier = multipliers[i%OUTPUTS];
            residual = residuals[i];
            @(posedge clk);
            #1;
            values++;
            if (rescaled !== 32'($signed(wanted_rescaled[i]))) begin
                mismatches++;
                $display("rescale(acc) %0d: %0d, not %0d", i, rescaled, $signed(wanted_rescaled[i]));
            end
`ifndef STEP_GELU_u_FILE
            if (y !== wanted[i]) begin
                mismatches++;
                $display("y %0d: %0d, not %0d", i, y, $signed(wanted[i]));
            end
`endif
        end
        $display("%0d values, %0d mismatches, %0d cycles", values, mismatches, cycles);
        $finish;
    end
endmodule
